"""Runs that outlive their cards: agents that meet, plan for the nodes that answer, start ranks, and go on."""
