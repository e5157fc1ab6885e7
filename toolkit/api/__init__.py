"""The classes and functions of ``import sm_train`` that work on a laptop."""
