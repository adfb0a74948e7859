"""What dies run: programs over their own HBM, and the messages by which the host starts them."""
