"""The routes that workers call for themselves, under `/api/node/` (§1).

Heartbeats and registration are raw ASGI routes.
"""

from django.urls import path

from nodes.api import worker_views

urlpatterns = [
    path("<str:node_id>", worker_views.SelfView.as_view()),
    path("<str:node_id>/drain", worker_views.SelfDrainView.as_view()),
    path("<str:node_id>/resume", worker_views.SelfResumeView.as_view()),
    path("<str:node_id>/rotate", worker_views.SelfRotateView.as_view()),
    path("<str:node_id>/deregister", worker_views.SelfDeregisterView.as_view()),
    path("<str:node_id>/models", worker_views.SelfReplicasView.as_view()),
]
