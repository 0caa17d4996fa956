"""TorchRec's layouts of embedding tables on DTensor: their chunks, checks of them, and TorchRec itself as a client."""
