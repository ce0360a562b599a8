"""Tool calls and reasoning: detected in streamed text, enforced by grammar, shown to models without a format."""
