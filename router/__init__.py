"""The front door: takes OpenAI requests, chooses a context and a generation worker, relays the answer."""
