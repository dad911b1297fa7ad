"""One slice of the model on one machine: the only code that knows llama.cpp."""
