"""Ways to make a loaded model faster; each is one module with one switch and is never needed for correctness."""
