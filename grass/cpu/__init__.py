"""The C++ kernel that steps float32 weights on the CPU, and its loader."""
