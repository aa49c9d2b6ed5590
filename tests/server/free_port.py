# SPDX-License-Identifier: Apache-2.0
"""A port for a program that must be told one."""

import random
import socket

given = set()


def free_port():
    """One of loopback that nobody listens on, and another one at each call. The system gives none
    below 32768 to others that ask for any port, so it is still free when the program binds it."""
    while True:
        port = random.randrange(20000, 32768)
        if port in given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        given.add(port)
        return port
