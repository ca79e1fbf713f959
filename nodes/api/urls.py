"""Routes of the registry under `/api/`. The heartbeat is a raw ASGI route in front of Django."""

from django.urls import path

from nodes.api import views, worker_views

urlpatterns = [
    path("node/register", worker_views.RegisterView.as_view()),
    path("node/<str:node_id>/drain", worker_views.SelfDrainView.as_view()),
    path("node/<str:node_id>/deregister", worker_views.SelfDeregisterView.as_view()),
    path("node/<str:node_id>/models", worker_views.SelfReplicasView.as_view()),
    path("nodes", views.NodesView.as_view()),
    path("nodes/models", views.ReplicasView.as_view()),
    path("nodes/<str:node_id>", views.NodeDetailView.as_view()),
    path("nodes/<str:node_id>/approve", views.ApproveView.as_view()),
    path("nodes/<str:node_id>/models", views.NodeReplicasView.as_view()),
    path("nodes/<str:node_id>/backends/install", views.InstallView.as_view()),
]
