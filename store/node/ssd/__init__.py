"""The node's SSD tier: what goes down, where it lies in the file, what comes up again."""
