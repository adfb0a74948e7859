"""The mathematics: arrays in, arrays out. No asyncio, no hardware."""
