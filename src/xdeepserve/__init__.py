"""xdeepserve: the CloudMatrix384 serving stack on a laptop, bit for bit."""

__version__ = "0.1.0"
