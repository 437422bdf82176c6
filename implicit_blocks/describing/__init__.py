"""Specs for people to look at: a model as a tree with shapes and parameters, and two specs side by side."""

from implicit_blocks.describing.changes import Change, changes, draw_changes
from implicit_blocks.describing.drawing import draw_run
from implicit_blocks.describing.tree import Node, model_tree

__all__ = ["Change", "Node", "changes", "draw_changes", "draw_run", "model_tree"]
