"""Measuring on one's own machine.

namespaces.py   hosts on one machine, joined by links of a chosen rate
"""
