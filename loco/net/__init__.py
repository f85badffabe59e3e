"""Messages between the members of one group: links, the transport over them, waits that can be given up."""
