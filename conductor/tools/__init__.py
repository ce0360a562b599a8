"""Tool calls and reasoning: found in text as it comes, asked for by grammar, shown to models without a form."""
