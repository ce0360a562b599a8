"""The tests of tanghulu: a tree of folders like that of the code."""
