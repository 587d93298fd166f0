"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const config = { displayModeBar: false, responsive: true };
const plots = Object.entries(figures).map(([id, figure]) => {
  const place = document.getElementById(id);
  Plotly.newPlot(place, figure.data, figure.layout, config);
  return place;
});
// paper is narrower than most windows, and nothing resizes for it
addEventListener("beforeprint", () => plots.forEach((plot) => Plotly.relayout(plot, { width: 660 })));
addEventListener("afterprint", () => plots.forEach((plot) => Plotly.relayout(plot, { width: null, autosize: true })));
