"""The runnable recipes, one a file; installed as `jprm.recipes`, so that `jprm train --config=<name>` finds them anywhere."""
