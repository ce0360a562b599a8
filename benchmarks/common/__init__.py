"""What every benchmark uses: where results are kept, and the tables of the docs made of them."""
