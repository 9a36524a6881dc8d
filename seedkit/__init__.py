"""seedkit: agentic self-distillation, small enough to read and token by token. Start with notebooks/00_quickstart."""
