"""`python -m varuna_capslog`: the command `capslog`."""

from varuna_capslog.cli import program

if __name__ == "__main__":
    program()
