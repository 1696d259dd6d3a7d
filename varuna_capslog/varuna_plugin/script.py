"""`python -m varuna_capslog.varuna_plugin.script train.py ...`: runs an unchanged Varuna script with the plugin.

A failure ends the process at once, since threads that wait for a dead neighbour would keep it alive.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from typing import NoReturn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.failures import leave

__all__ = ["main"]


def main() -> NoReturn:
    """Run the script named first on the command line with the arguments behind it, as `python` would."""
    script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    status = 0
    try:
        from varuna_capslog.varuna_plugin.install import install
        from varuna_capslog.varuna_plugin.wire import peer_errors

        install()
        # an error in the script's own collectives becomes one sentence, too
        with peer_errors("running the script's own collectives", None):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except CapslogError as error:
        sys.stderr.write(f"rank {os.environ.get('RANK', '?')}: {error}\n")
        status = error.exit_status
    except BaseException:
        traceback.print_exc()
        status = 1
    leave(status)


if __name__ == "__main__":
    main()
