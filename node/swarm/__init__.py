"""The network side of a peer: bytes only, no tensors. Runs on one asyncio thread; `api` is what the training thread sees."""
