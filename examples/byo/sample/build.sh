# What a build is here: every kernel's source is compiled to bytecode.
python3 -m compileall -q kernels
