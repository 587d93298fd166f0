"""Python imports this at its start where the tests put its folder on the path: nothing here may use a network.

An audit hook sees what every library does, in C too, and cannot be taken off again. Sockets of the AF_UNIX family are
left alone: event loops and process pools talk to themselves through them, and they lead to no other machine.
"""

import sys

_ADDRESSED = {"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"}
_RESOLVING = {"socket.getaddrinfo", "socket.getnameinfo", "socket.gethostbyname", "socket.gethostbyaddr"}


def _refuse(event, arguments):
    if event in _RESOLVING or (event in _ADDRESSED and getattr(arguments[0], "family", None) != 1):
        raise OSError(f"a test asked for the network: {event} {arguments[1:]!r}")


sys.addaudithook(_refuse)
