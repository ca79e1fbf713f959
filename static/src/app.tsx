// The routes, and what lies around all of them. Each page's code is loaded when it is opened.
import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { Tooltip } from "radix-ui";
import type { ReactNode } from "react";
import { createBrowserRouter, Navigate, RouterProvider, type RouteObject } from "react-router";
import { ApiError } from "./api/client";
import { LiveContext } from "./live/hooks";
import { LiveStore } from "./live/store";
import { AppError, PageError } from "./shell/boundary";
import { Checking } from "./shell/gate";
import { NotFound } from "./shell/not-found";
import { PLACES } from "./shell/places";
import { Shell } from "./shell/shell";
import { SignInPage } from "./shell/sign-in";
import { Announcer } from "./ui/announce";
import { lazyPage } from "./ui/lazy";

const queries = new QueryClient({
  defaultOptions: {
    queries: {
      // Without a network a request fails at once; it does not wait for the network.
      networkMode: "always",
      // A page that opens shows cached data and reads it again, because a closed page does not follow the feed.
      refetchOnWindowFocus: false,
      retry: (failures, error) => failures < 2 && error instanceof ApiError && (error.status === 0 || error.status >= 500),
    },
    mutations: { retry: false, networkMode: "always" },
  },
});

const store = new LiveStore();

const pages: RouteObject[] = [
  { index: true, element: <Navigate to="overview" replace /> },
  ...PLACES.map(({ to, load }) => ({ path: to, lazy: lazyPage(load) })),
  { path: "nodes/:id/:part?", lazy: lazyPage(async () => (await import("./nodes/detail/page")).NodePage) },
  { path: "operations/:id", lazy: lazyPage(async () => (await import("./operations/operation-page")).OperationPage) },
  { path: "activity/inbox", lazy: lazyPage(async () => (await import("./operations/inbox")).InboxPage) },
  { path: "activity/history", lazy: lazyPage(async () => (await import("./operations/history")).HistoryPage) },
  { path: "activity/changes", lazy: lazyPage(async () => (await import("./operations/changes")).ChangesPage) },
  { path: "capacity/what-if", lazy: lazyPage(async () => (await import("./capacity/what-if")).WhatIfPage) },
  { path: "models/add", lazy: lazyPage(async () => (await import("./models/add-page")).AddModelPage) },
  { path: "models/:name/:tab?", lazy: lazyPage(async () => (await import("./models/model-page")).ModelPage) },
  { path: "backends/:name", lazy: lazyPage(async () => (await import("./backends/detail")).BackendPage) },
  { path: "keys", lazy: lazyPage(async () => (await import("./keys/page")).KeysPage) },
  { path: "password", lazy: lazyPage(async () => (await import("./shell/password")).PasswordPage) },
  { path: "*", element: <NotFound /> },
];

const around = { errorElement: <AppError />, hydrateFallbackElement: <Checking /> };

const router = createBrowserRouter([
  { path: "/login", element: <SignInPage />, ...around },
  {
    path: "/app",
    element: <Shell />,
    ...around,
    children: pages.map((page) => ({ ...page, errorElement: <PageError /> })),
  },
  { path: "*", element: <Navigate to="/app" replace />, ...around },
]);

export function App(): ReactNode {
  return (
    <QueryClientProvider client={queries}>
      <LiveContext.Provider value={store}>
        <Tooltip.Provider delayDuration={300}>
          {/* Not as a transition: the feed's changes would begin the drawing of the next page again, for up to five seconds. */}
          <RouterProvider router={router} useTransitions={false} />
          <Announcer />
        </Tooltip.Provider>
      </LiveContext.Provider>
    </QueryClientProvider>
  );
}
