// Nothing: the target compiles the headers that the others share.
