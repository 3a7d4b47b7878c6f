"""Faults and recoveries, told as stories: the same ones over the fake and over the genuine frontend."""
