"""Facts about the engines that more than one service needs."""
