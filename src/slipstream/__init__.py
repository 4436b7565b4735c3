"""Fine-tune Hugging Face causal language models faster, without changing what is learned."""
