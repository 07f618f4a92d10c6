"""Kernels written for the emulator's tests."""
