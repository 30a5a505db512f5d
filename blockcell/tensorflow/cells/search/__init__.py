"""The search for cells, and the reasons why something that resembles a cell is refused."""
