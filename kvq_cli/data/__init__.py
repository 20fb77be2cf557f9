"""Calibration and evaluation text: built in, from files, or from the Hugging Face Hub."""
