// Sort a table by a column: a click on its title, a second one for the opposite order. Empty cells stay last.
for (const head of document.querySelectorAll("thead th")) {
  const button = document.createElement("button");
  button.append(...head.childNodes);
  button.title = "sort";
  head.append(button);
  button.onclick = () => {
    const descending = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const body = head.closest("table").tBodies[0];
    const key = (row) => row.cells[head.cellIndex].dataset.value ?? row.cells[head.cellIndex].textContent;
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (!x || !y) return !x - !y;
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return descending ? -order : order;
    });
    body.append(...rows);
  };
}
