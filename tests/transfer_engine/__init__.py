"""Tests of the transfer engine as a whole, with real owners in processes of their own."""
