"""Expert servers in processes of their own: their buffers, and how clients reach them from a pod."""
