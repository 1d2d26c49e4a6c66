"""Passes that divide a model among ranks: its operators, or the captured graph as stages."""
