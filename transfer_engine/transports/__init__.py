"""The transports, each a folder with its client's and its owner's side, and the registry that lists them."""
