"""TorchRec's layouts of embedding tables on DTensor: who holds what, checks of it, and TorchRec itself as a client."""
