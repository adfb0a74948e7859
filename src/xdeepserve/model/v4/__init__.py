"""DeepSeek-V4: hyper-connections, a sliding window beside compressed positions, and experts found by hash."""
