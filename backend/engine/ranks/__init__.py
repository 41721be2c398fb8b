"""Divides a model among ranks: processes, on one or several machines, that each load a part of it.

Rank 0, the leader, serves clients, plans and samples. The other ranks, its followers, carry out the
plans of rank 0.
"""
