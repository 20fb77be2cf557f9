"""Kinds of calibration: each plans, estimates and runs what one kind of spec asks for."""
