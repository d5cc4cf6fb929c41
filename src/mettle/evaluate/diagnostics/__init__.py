"""What is wrong with data or embeddings: label errors, hardest pairs, duplicates, leakage, geometry."""
