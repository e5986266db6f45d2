"""The memory that compiled programs run on: stores per tier, budget, states, and the steps that use them."""
