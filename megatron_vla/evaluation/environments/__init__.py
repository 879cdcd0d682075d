"""Simulators behind one small interface: reset(seed), step(action), observation dict, success, instruction."""
