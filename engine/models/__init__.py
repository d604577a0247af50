"""Model families: from a checkpoint's tensors to logits over the paged pool."""
