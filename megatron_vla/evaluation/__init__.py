"""Closed-loop evaluation: policies, servers, simulators, rollouts, reports."""
