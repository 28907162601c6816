// Starts the application in a host: a page with an element #explorer, or a widget.

import { render } from "preact";
import { Api } from "./api";
import { App } from "./app";
import { AddressRoutes, formatRoute, parseRoute, VariableRoutes, type Route } from "./route";
import { FileTransport, HttpTransport, type Report } from "./transport";
import { keepKeys, WidgetTransport, type WidgetModel } from "./widget";
import "./style.css";

/** What a host writes as JSON into the element #explorer-host. */
interface Host extends Partial<Report> {
  /** Path of the API, and what it asks for. */
  http?: { base: string; token: string };
}

function start(): void {
  const element = document.getElementById("explorer");
  const about = document.getElementById("explorer-host");
  if (!element || !about) return;
  const host = JSON.parse(about.textContent ?? "{}") as Host;
  const transport = host.http ? new HttpTransport(host.http.base, host.http.token) : new FileTransport({ answers: {}, ...host });
  render(<App api={new Api(transport)} routes={new AddressRoutes()} />, element);
}

start();

/** The module of anywidget. */
export default {
  render({ model, el }: { model: WidgetModel; el: HTMLElement }) {
    const transport = new WidgetTransport(model);
    el.classList.add("lazyckpt-explorer");
    const resize = () => el.style.setProperty("--explorer-height", `${model.get("height")}px`);
    resize();
    model.on("change:height", resize);
    keepKeys(el);
    // the state of the widget, which a notebook may save, has the page that is shown
    const keep = (route: Route) => {
      try {
        model.set("route", formatRoute(route));
        model.save_changes();
      } catch {
        // the kernel is gone: requests say so, and what was loaded can still be looked at
      }
    };
    render(<App api={new Api(transport)} routes={new VariableRoutes(parseRoute(model.get("route")), keep)} />, el);
    return () => {
      model.off("change:height", resize);
      render(null, el);
      transport.close();
    };
  },
};
