"""The engine in other libraries: transformers, accelerate, Megatron-style process groups."""
