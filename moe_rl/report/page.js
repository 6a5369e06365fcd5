"use strict";
// Draws every .plot from the JSON of the page, in the page's colours, and again when light and dark mode change places.
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches; // there a finger that drags means to scroll
  const scales = {
    light: [[0, "#f7f9fc"], [0.15, "#d5e3f1"], [0.4, "#8ab4d8"], [0.7, "#2f78b7"], [1, "#08306b"]],
    dark: [[0, "#1c242e"], [0.15, "#20405f"], [0.4, "#2f78b7"], [0.7, "#8ab4d8"], [1, "#eaf3fb"]],
  };

  function themed(layout) {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const axis = {
      gridcolor: color("--grid"), linecolor: color("--rule"), zerolinecolor: color("--rule"), automargin: true,
      ticks: "outside", ticklen: 4, tickcolor: color("--rule"), exponentformat: "power",
    };
    const title = (given) => ({ title: { text: given.title.text, standoff: 8, font: { size: 12, color: color("--soft") } } });
    return Object.assign(
      { showlegend: false, margin: { l: 8, r: 14, t: 12, b: 8 }, dragmode: touch ? false : "zoom" }, layout, {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("--ink") },
        hoverlabel: { bgcolor: color("--raised"), bordercolor: color("--rule"), font: { color: color("--ink") } },
        legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, bgcolor: "rgba(0,0,0,0)" },
        xaxis: Object.assign({}, axis, layout.xaxis, title(layout.xaxis)),
        yaxis: Object.assign({}, axis, layout.yaxis, title(layout.yaxis)),
      });
  }

  function draw() {
    const scale = scales[dark.matches ? "dark" : "light"];
    return Promise.all([...document.querySelectorAll(".plot")].map((place) => {
      const figure = figures[place.dataset.figure];
      const soft = getComputedStyle(document.documentElement).getPropertyValue("--soft").trim();
      const data = figure.data.map((trace) => {
        if (trace.type !== "heatmap") return trace;
        const bar = Object.assign({}, trace.colorbar, { title: Object.assign({ font: { size: 12, color: soft } }, trace.colorbar.title) });
        return Object.assign({}, trace, { colorscale: scale, colorbar: bar });
      });
      const options = { responsive: true, displayModeBar: false };
      return Plotly.react(place, data, themed(figure.layout), options);
    }));
  }

  draw().then(() => document.body.setAttribute("data-drawn", "true"));
  dark.addEventListener("change", draw);
})();
