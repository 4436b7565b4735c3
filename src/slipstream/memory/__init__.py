"""What becomes of a layer's activations between forward and backward."""
