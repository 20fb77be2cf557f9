"""Calibration and evaluation texts: built in, from files, or from the Hub."""
