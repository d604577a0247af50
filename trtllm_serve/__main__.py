"""`python -m trtllm_serve` is `trtllm-serve`."""

from trtllm_serve.cli import main

if __name__ == "__main__":
    main(prog_name="trtllm-serve")
